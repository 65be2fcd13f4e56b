"""The arithmetic: one op a file, each with its plain-torch meaning."""
