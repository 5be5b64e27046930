"""Changes of files and directories, through inotify. Does not interpret file contents."""
