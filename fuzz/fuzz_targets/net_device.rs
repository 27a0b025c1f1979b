#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    towline_fuzz::sys::ignore_sigpipe();
    if let Err(why) = towline_fuzz::net_device::play(data) {
        // Nothing can be found on such a machine.
        eprintln!("net_device: {why}");
        std::process::exit(0);
    }
});
