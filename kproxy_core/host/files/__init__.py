"""Files and directories: changes through inotify, locks, and files of our own. Interprets no contents."""
