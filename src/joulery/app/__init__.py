"""Use cases of joulery, a module each: read the site file, wire adapters to live loops. No lower layer imports them."""
