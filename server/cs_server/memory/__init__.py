"""The server's segments: mapped here, and served to peers that cannot map them."""
