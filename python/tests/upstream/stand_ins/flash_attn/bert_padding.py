pad_input = unpad_input = index_first_axis = rearrange = None
