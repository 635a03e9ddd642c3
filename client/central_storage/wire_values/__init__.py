"""Values and exceptions as the closed vocabulary that travels between processes."""
