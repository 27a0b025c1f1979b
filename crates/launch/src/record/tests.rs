use super::*;

fn record(text: &str) -> (String, Vec<String>) {
    let recorded = CommandLine::parse(text.split(' ')).unwrap().record().unwrap();
    let words: Vec<_> =
        recorded.command_line().to_arguments().into_iter().map(|word| word.into_string().unwrap()).collect();
    (words.join(" "), recorded.redacted_keys().to_vec())
}

#[test]
fn options_of_the_process_and_what_only_they_use_are_not_recorded() {
    let text = "-name guest=web,debug-threads=on -S -machine q35 -chardev socket,id=charmonitor,fd=21,server=on,wait=off \
                -mon chardev=charmonitor,id=monitor,mode=control -chardev socket,id=agent,path=/a -serial chardev:agent \
                -object secret,id=s0,data=x -object tls-creds-x509,id=t0,dir=/pki,passwordid=s0 -vnc :0,tls-creds=t0 \
                -object monitor-qmp,id=m0,chardev=c0 -chardev null,id=c0 -sandbox on -daemonize -incoming defer -chardev null,id=own";
    let (kept, left_out) = record(text);
    assert_eq!(
        kept,
        "-name web,debug-threads=on -machine q35 -chardev socket,id=agent,path=/a -serial chardev:agent -chardev null,id=own"
    );
    assert_eq!(left_out, [""; 0]);
}

#[test]
fn secrets_are_left_out_and_named() {
    let text = "-object secret,id=s0,data=hunter2 -drive id=d0,file.password-secret=s0,if=none -iscsi user=me,password=hunter2 \
                -fw_cfg name=opt/a,string=hunter2 -smbios type=11,value=hunter2 -smbios type=1,serial=7 \
                -drive id=d1,file=https://me:hunter2@host/a -drive id=d2,file=rbd:pool/a:key=hunter2 -hda nbd://me:hunter2@host/a \
                -drive id=d3,file=json:{\"driver\":\"ssh\",,\"password\":\"hunter2\"} -drive id=d4,file=ssh://me@host/a \
                -blockdev {\"node-name\":\"b0\",\"driver\":\"https\",\"cookie\":\"hunter2\"} -append root=/dev/vda";
    let (kept, left_out) = record(text);
    assert!(!kept.contains("hunter2"), "{kept}");
    assert_eq!(
        left_out,
        [
            "object.s0.data",
            "iscsi.password",
            "fw_cfg.string",
            "smbios.0.value",
            "drive.d1.file",
            "drive.d2.file",
            "hda",
            "drive.d3.file",
            "blockdev.b0.cookie"
        ]
    );
    assert!(
        kept.contains("password-secret=s0")
            && kept.contains("ssh://me@host")
            && kept.contains("root=/dev/vda")
    );
}

#[test]
fn recorded_command_line_is_read_as_it_was_written() {
    let line = CommandLine::parse(["-machine", "q35", "-S", "-nodefaults", "-object", "secret,id=s,data=x"])
        .unwrap();
    let mut line = line.clone();
    line.push(QemuOption::parse(OptionName::find("device").unwrap(), Some("virtio-net-pci,id=n")).unwrap())
        .unwrap();
    let recorded = line.record().unwrap();
    let json = recorded.to_json();
    assert_eq!(
        json,
        r#"{"version":1,"options":[{"option":"machine","value":"q35"},{"option":"nodefaults"},{"option":"object","value":"secret,id=s"},{"option":"device","value":"virtio-net-pci,id=n"}],"left-out":["object.s.data"]}"#
    );
    assert_eq!(Recorded::from_json(json.as_bytes()).unwrap(), recorded);
}

#[test]
fn recorded_command_lines_of_another_form_are_refused() {
    let error = |json: &str| Recorded::from_json(json.as_bytes()).unwrap_err();
    assert_eq!(error(r#"{"version":2,"options":[]}"#), ParseError::Version { found: 2, expected: 1 });
    assert!(matches!(error("[]"), ParseError::Recorded { .. }));
    assert!(matches!(
        error(r#"{"version":1,"options":[{"option":"readconfigs","value":"/x"}]}"#),
        ParseError::UnknownOption { .. }
    ));
    assert_eq!(
        error(r#"{"version":1,"options":[{"option":"S","value":"x"}]}"#),
        ParseError::UnexpectedValue { option: "-S".into() }
    );
    let many = format!(
        r#"{{"version":1,"options":[{}{{"option":"S"}}]}}"#,
        r#"{"option":"S"},"#.repeat(OPTIONS_MAX)
    );
    assert_eq!(error(&many), ParseError::TooManyOptions);
    assert_eq!(
        error(&" ".repeat(COMMAND_LINE_BYTES_MAX + 1)),
        ParseError::TooLong { found: COMMAND_LINE_BYTES_MAX + 1 }
    );
    let keys = vec!["a.b"; LEFT_OUT_MAX + 1];
    let json = serde_json::json!({ "version": 1, "options": [], "left-out": keys }).to_string();
    assert_eq!(error(&json), ParseError::TooManyLeftOut);
    assert_eq!(error(r#"{"version":1,"options":[],"left-out":["a=b"]}"#), ParseError::TooManyLeftOut);
    for key in ["disk.d0.file", "monitor", "S", "cpu", "drive", "drive.d0.file (your password)", "hda.d0"] {
        let json = serde_json::json!({ "version": 1, "options": [], "left-out": [key] }).to_string();
        assert_eq!(
            error(&json),
            ParseError::Recorded { reason: format!("left-out has {key:?}, which is not a secret") }
        );
    }
}

#[test]
fn an_option_with_a_malformed_id_is_addressed_by_its_number() {
    let text = "-drive if=none -drive file=rbd:p/a:key=x,id=a=b";
    let recorded = CommandLine::parse(text.split(' ')).unwrap().record().unwrap();
    assert_eq!(recorded.redacted_keys(), ["drive.1.file"]);
    assert_eq!(Recorded::from_json(recorded.to_json().as_bytes()).unwrap(), recorded);
}
