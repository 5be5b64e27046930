"""The proxies that scenarios are played against, and the paths by which objects reach them."""
