"""The transforms, one a file."""
