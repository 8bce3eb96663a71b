"""Tall matrices, directions of low rank, and rows that other workers hold."""
