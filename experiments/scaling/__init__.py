"""What attention costs on more devices than one."""
