"""Buckets: run folders and data that lie in an object store. Requests go through fsspec."""
