"""The container that torch wrote before 1.6, and writes on request."""
