#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    towline_fuzz::sys::ignore_sigpipe();
    if let Err(why) = towline_fuzz::net_device::play(data) {
        // The target needs rights that this process does not have.
        eprintln!("net_device: {why}");
        std::process::exit(0);
    }
});
