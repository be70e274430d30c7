"""What tests share: the corpus, stock and fast side by side, loading both ways."""
