"""A broker connection that reconnects by itself, and a program's presence on it. The only room that imports paho."""
