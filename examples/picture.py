def draw_lattices(): pass
