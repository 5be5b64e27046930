"""New connections of Services, added up from the counts of backends. Nothing here decides about traffic."""
