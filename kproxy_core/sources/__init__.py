"""Where objects come from: the only places that know API JSON."""
