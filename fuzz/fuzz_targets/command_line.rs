//! Command lines of processes and of images: they are read or refused, and what is allowed names nothing of
//! this host.

#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| towline_fuzz::launch::command_line(data));
