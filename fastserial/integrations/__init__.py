"""Other frameworks' extension points. Each module imports its framework, and nothing else does."""
