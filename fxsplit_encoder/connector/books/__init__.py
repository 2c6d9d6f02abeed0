"""The connector's state, without threads or devices. All of it changes under one lock.

state      waits for                      moved on by               holds memory for
new        headers, hash, memory,         Preparation, Admission    raw media; rows on the host
           decoding                                                 from admission on
queued     an encoder                     Encoding.take             preprocessed inputs too
encoding   its batch, or its copy         Encoding.publish          its batch's staging too
ready      being read and released        Books.release             rows, on a device or the host
"""
