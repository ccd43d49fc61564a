"""Images that a camera writes into a folder: new ones, the answers' majority, and a sensor of Home Assistant."""
