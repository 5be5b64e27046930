"""All input and output of the ipvs mode with the kernel. Decisions about what to write do not belong here."""
