"""Rows to figures, tables and sentences. No number is made here."""
