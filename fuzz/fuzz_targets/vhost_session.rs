#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    towline_fuzz::sys::ignore_sigpipe();
    towline_fuzz::vhost_user::session(data);
});
