"""Segments in this process: mapped, page-locked, handed out piece by piece, or read through the server."""
