"""Starting, guarding and ending processes of our own. Imports no library, so that programs that only start others start fast."""
