"""The command line: a command parses, makes one call of the library, and prints."""
