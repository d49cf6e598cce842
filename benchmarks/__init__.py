"""One question per module; each prints the table that answers it and can write JSON."""
