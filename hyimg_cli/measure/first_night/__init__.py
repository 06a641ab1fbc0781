"""The first night of a model: photographs edited twice, killed, resumed and compared."""
