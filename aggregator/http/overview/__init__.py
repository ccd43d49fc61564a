"""A page and an API over several fleets, whose figures are read from the API of each fleet's dashboard."""
