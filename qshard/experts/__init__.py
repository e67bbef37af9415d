"""Experts of other libraries."""
