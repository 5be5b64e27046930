"""Pure decisions: from Services, endpoints and node facts to service plans."""
