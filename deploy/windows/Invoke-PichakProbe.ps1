<#
.SYNOPSIS
    One run of the scheduled task: measures this machine inside WSL2, into one file.
#>
[CmdletBinding()]
param(
    [Parameter(Mandatory = $true)]
    [string] $OutFolder,

    [Parameter(Mandatory = $true)]
    [ValidatePattern('^[A-Za-z0-9._~/-]+$')]
    [string] $Pichak,

    [ValidatePattern('^[A-Za-z0-9._-]*$')]
    [string] $Distribution = '',

    [int] $Keep = 100,

    [ValidatePattern('^[A-Za-z0-9 ._=:,/-]*$')]
    [string] $ProbeOptions = ''
)

Set-StrictMode -Version 3.0
$ErrorActionPreference = 'Stop'

$inDistribution = @()
if ($Distribution) {
    $inDistribution = @('-d', $Distribution)
}
$stamp = (Get-Date).ToUniversalTime().ToString('yyyyMMddTHHmmssZ')
$name = "$env:COMPUTERNAME-$stamp"

# The file is written inside WSL, where a rename is atomic, and comes out whole or not at all. There
# is no double quote in this command: Windows PowerShell 5.1 would lose it on the way.
$command = 'd=$(mktemp -d) && ' + "$Pichak agent probe --quiet --out " + '$d/probe.mpk ' + $ProbeOptions +
    ' && base64 -w 0 $d/probe.mpk; code=$?; rm -rf $d; exit $code'
# What a program writes to its error stream is no error of this script's.
$ErrorActionPreference = 'Continue'
$text = & wsl.exe @inDistribution --exec bash -c $command 2> (Join-Path $OutFolder "$name.log")
$code = $LASTEXITCODE
$ErrorActionPreference = 'Stop'
if ($code -ne 0 -or -not $text) {
    throw "pichak agent probe ended with $code; $name.log in $OutFolder says why."
}
$part = Join-Path $OutFolder "$name.part"
[System.IO.File]::WriteAllBytes($part, [System.Convert]::FromBase64String(($text -join '')))
Move-Item -LiteralPath $part -Destination (Join-Path $OutFolder "$name.mpk")
Remove-Item -LiteralPath (Join-Path $OutFolder "$name.log")

Get-ChildItem -LiteralPath $OutFolder -Filter '*.mpk' |
    Sort-Object -Property LastWriteTimeUtc -Descending |
    Select-Object -Skip $Keep |
    Remove-Item
