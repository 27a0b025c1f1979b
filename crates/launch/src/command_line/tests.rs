use proptest::prelude::*;

use super::*;

fn words(line: &CommandLine) -> String {
    let words: Vec<_> = line.to_arguments().into_iter().map(|word| word.into_string().unwrap()).collect();
    words.join(" ")
}

fn parse(text: &str) -> Result<CommandLine, ParseError> {
    CommandLine::parse(text.split(' '))
}

#[test]
fn command_line_is_written_as_it_was_read() {
    let text = "-M pc-q35-10.0,accel=kvm,smm=off --cpu Nehalem,+avx,-x2apic,hv-time=on -m 1G,slots=2,maxmem=4G -smp 2,sockets=2 \
                -object memory-backend-ram,id=ram0,size=1G -numa node,memdev=ram0 -global ICH9-LPC.disable_s3=1 -S disk.img \
                -device {\"addr\":\"0x2\",\"driver\":\"e1000\",\"multifunction\":true} -chardev socket,id=c,path=/a,,b,server";
    let line = parse(text).unwrap();
    let wanted = text.replace("-M ", "-machine ").replace("--cpu", "-cpu");
    assert_eq!(words(&line), wanted);
    assert_eq!(parse(&wanted).unwrap(), line);
    assert_eq!(line.merged_value("machine", "type").as_deref(), Some("pc-q35-10.0"));
    let size = MemorySize { size_bytes: 1 << 30, slots: 2, size_bytes_max: Some(4 << 30) };
    assert_eq!(line.memory_size(), Ok(Some(size)));
    assert!(line.object("ram0").is_some());
    assert_eq!(line.options()[8].name, DISK_FILE);
}

#[test]
fn contents_of_proc_are_parsed_without_the_program() {
    let line = CommandLine::parse_proc(b"/usr/bin/qemu\0-S\0-append\0\0-m\x00256\0").unwrap();
    assert_eq!(line.to_arguments(), ["-S", "-append", "", "-m", "256"]);
    assert_eq!(line.memory_size().unwrap().unwrap().size_bytes, 256 << 20);
    assert_eq!(CommandLine::parse_proc(b""), Ok(CommandLine::default()));
    // Started by the dynamic loader.
    let loaded = b"/lib/ld-linux-x86-64.so.2\0--inhibit-cache\0--library-path\0/opt/lib\0/opt/qemu\0-S\0-append\0\0-m\x00256\0";
    assert_eq!(CommandLine::parse_proc(loaded), Ok(line));
}

#[test]
fn global_has_two_forms() {
    for (text, wanted) in [
        ("a.b=c,d=e", "a.b=c,d=e"),
        ("driver=a,property=b,value=c", "a.b=c"),
        ("driver=a.x,property=b,value=c,,d", "driver=a.x,property=b,value=c,,d"),
        ("a.b.c=d", "driver=a,property=b.c,value=d"),
    ] {
        let line = CommandLine::parse(["-global", text]).unwrap();
        assert_eq!(words(&line), format!("-global {wanted}"));
        assert_eq!(CommandLine::parse(line.to_arguments()).unwrap(), line);
    }
}

#[test]
fn properties_of_several_machines_are_merged() {
    let line = parse("-machine q35,smm=on -machine smm=off,type=pc").unwrap();
    assert_eq!(line.merged_value("machine", "smm").as_deref(), Some("off"));
    assert_eq!(line.merged_value("machine", "type").as_deref(), Some("pc"));
}

#[test]
fn malformed_command_lines_are_refused_with_the_option() {
    let text = |words: &[&str]| CommandLine::parse(words).unwrap_err().to_string();
    assert_eq!(
        text(&["-machin", "q35"]),
        "option -machin is not known: expected one of QEMU 7.2 to 11.1; start QEMU without it"
    );
    assert_eq!(text(&["-m"]), "-m has no value; add it");
    assert_eq!(
        text(&["-device", "a,b=c,"]),
        "value of -device is malformed: no property follows the last comma"
    );
    assert_eq!(text(&["-append", "a\nb"]), "value of -append has a control character; remove it");
    assert_eq!(
        text(&["-global", "a"]),
        "value of -global is malformed: \"a\", expected DRIVER.PROPERTY=VALUE"
    );
    assert!(text(&["-device", "{\"a\""]).starts_with("value of -device is malformed: not a JSON object: "));
    let long = "a".repeat(VALUE_BYTES_MAX + 1);
    assert_eq!(
        text(&["-append", &long]),
        "value of -append has 16385 bytes, expected at most 16384; shorten it"
    );
    let not_utf8 = CommandLine::parse([OsStr::from_bytes(b"-S"), OsStr::from_bytes(b"\xff")]);
    assert_eq!(not_utf8, Err(ParseError::NotUtf8 { position: 2 }));
    assert_eq!(CommandLine::parse(vec!["-S"; OPTIONS_MAX + 1]), Err(ParseError::TooManyOptions));
    let size = parse("-m 1X").unwrap().memory_size().unwrap_err().to_string();
    assert_eq!(size, "value of -m is malformed: \"1X\", expected a size such as 512M or 4G");
}

#[test]
fn a_disk_file_cannot_become_an_option() {
    let error = QemuOption::parse(DISK_FILE, Some("-daemonize")).unwrap_err();
    assert_eq!(error, ParseError::UnknownOption { option: "-daemonize".into() });
    assert!(CommandLine::parse(["-(disk file)"]).is_err());
}

proptest! {
    #[test]
    fn whatever_is_parsed_is_written_as_something_that_parses_to_the_same(
        name in prop::sample::select(vec!["-machine", "-device", "-object", "-drive", "-cpu", "-global", "-chardev", "-append"]),
        value in "[a-c{}\":=,./+-]{0,24}",
    ) {
        if let Ok(line) = CommandLine::parse([name, value.as_str()]) {
            let again = CommandLine::parse(line.to_arguments());
            prop_assert_eq!(again.as_ref(), Ok(&line));
            // QEMU counts the last of several values; so do both forms.
            prop_assert_eq!(again.unwrap().to_arguments(), line.to_arguments());
        }
    }
}
