"""Plain-torch oracle: what every kernel must compute, written slowly and obviously."""
