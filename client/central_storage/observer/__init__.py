"""Observers: processes that read a running service."""
