"""What a placement costs: rows, bytes, seconds and memory, predicted from popularity. Pure."""
