"""What others do, on the same models: the policies joulery is compared with."""
