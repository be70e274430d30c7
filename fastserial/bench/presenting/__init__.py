"""Results as tables, plots and files."""
