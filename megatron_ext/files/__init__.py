"""Files that others look at too: who may write them, and pieces that are whole or absent."""
