"""A broker connection that reconnects by itself, and the presence of a program on it. The only room that imports paho."""
