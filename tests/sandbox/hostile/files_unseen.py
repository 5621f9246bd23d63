"""Makes files in a directory that nobody may list."""

os.chmod("/sandbox", 0o300)
for number in range(2000):
    os.close(os.open(f"/sandbox/{number}", os.O_CREAT))
time.sleep(60)
