"""The laboratory: what the command ``dome`` runs. Extra: ``dome-torch[lab]``."""
