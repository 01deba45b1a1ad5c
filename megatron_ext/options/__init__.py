"""What a value of an option may be, before anything heavy is imported: numbers, paths, words."""
