"""A broker connection that reconnects by itself. The only room that imports paho."""
