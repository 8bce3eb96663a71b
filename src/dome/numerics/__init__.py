"""Everything that walks over the D rows of a basis."""
