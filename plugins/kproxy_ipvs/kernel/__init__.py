"""The kernel objects of the ipvs mode: all of its input and output."""
