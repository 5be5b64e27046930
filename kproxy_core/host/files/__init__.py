"""Files and directories as the kernel reports changes to them."""
