"""Which addresses are public, however they are written."""

import pytest

from raylens.preprocess.public_addresses import is_literal_address, is_public_address


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"],
)
def test_global_unicast_is_public(address: str) -> None:
    assert is_public_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.0.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254", "172.16.0.1", "192.168.0.1"),
        *("100.64.0.1", "100.100.100.200"),  # shared address space; a cloud's metadata
        *("192.0.0.8", "192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255"),
        "168.63.129.16",  # Azure
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1"),
        *("::127.0.0.1", "::8.8.8.8"),  # "IPv4-compatible"
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:127.0.0.1"),
        *("64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::8.8.8.8"),
        *("2002:7f00:1::", "2002:a9fe:a9fe::", "2002:808:808::"),  # 6to4
        *("2001:0:53aa:64c:0:7f8c:80ff:fffe", "2001:0:808:808::"),  # Teredo
        *("2001:db8::1", "2001:2::1", "3fff::1", "100::1", "5f00::1", "4000::1"),
    ],
)
def test_everything_else_is_not(address: str) -> None:
    assert not is_public_address(address)


@pytest.mark.parametrize(
    ("host", "literal"),
    [
        *(("127.0.0.1", True), ("::1", True), ("fe80::1%eth0", True)),
        *(("example.com", False), ("example.com.", False), ("1.example.com", False), ("0x7f.example", False)),
        *(("3com", False), ("face", False), ("xn--fiqs8s", False)),
    ],
)
def test_names_and_addresses_are_told_apart(host: str, literal: bool) -> None:
    assert is_literal_address(host) is literal


@pytest.mark.parametrize(
    "host",
    [
        *("2130706433", "127.1", "127.0.1", "0177.0.0.1", "0x7f.1", "0x7f000001", "0x7f.0.0.0x1", "127.0.0.0x1"),
        *("127.0.0.1.", "127.0.0.01", "256.1.1.1", "1.2.3.4.5", "example.1", "example.0x", "0X7F.1", "1:2:3"),
    ],
)
def test_ambiguous_addresses_are_errors(host: str) -> None:
    with pytest.raises(ValueError, match="does not appear|Expected|At most|permitted"):
        is_literal_address(host)
