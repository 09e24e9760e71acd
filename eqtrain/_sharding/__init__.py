"""Meshes, placements and the collectives between devices."""
