"""Words that `wordle` draws from: common English words of five letters.

Written down by hand for this game, the most everyday ones first; the order is part of
recorded episodes, so new words are appended.
"""

from __future__ import annotations

_TEXT = """
about above after again apple beach bread bring brown chair cheap clean clock cloud
dance doing dream drink drive early earth eight every field first floor fruit glass
grand grass great green group happy heart heavy horse hotel house juice knife large
laugh learn leave lemon level light lucky lunch magic metal money month mouth music
never night noise north ocean often onion other paint paper party peace phone piano
place plane plant plate point price queen quick quiet radio ready right river round
salad seven shape sharp sheep shirt short sleep small smile smoke south space spoon
stand start steel stone store storm story sugar sweet table thank there thing think
three tiger today tooth touch tower train truth uncle under voice water watch wheel
where white whole woman world write wrong young zebra
admit adopt adult agree alarm album alert alive allow alone among angel anger angle
ankle apart apron arena argue armor aroma arrow aside asset audio avoid awake award
bacon badge baker basic basin basis batch below bench berry birth black blade blame
blank blast blaze blend bless blind block blood board boast bonus boost booth brain
brake brand brave brick bride brief broad brush build bunch cabin cable camel
candy canoe cargo carry carve catch cause chain chalk charm chart chase cheek cheer
chess chest chief child chill choir civic claim class clerk climb cling cloak close
cloth coach coast couch count court cover crack craft crane crash cream crime crisp
cross crowd crown cruel crust curve cycle daily dairy delay depth devil diary dirty
dozen draft drain drama dress drift drill eager eagle elbow elder empty enemy enjoy
enter entry equal error event exact exist extra faint fairy faith false fancy fault
feast fence fever fiber fifth fifty fight final flame flash fleet flesh float flock
flood flour fluid flute focus force forty frame fresh front frost funny ghost giant
glove grace grade grain grape graph grave greet guard guess guest guide habit honey
honor human humor ideal image index inner input issue ivory jelly jewel joint judge
kneel knock label labor later layer limit linen liver local logic loose loyal march
marsh match mayor medal media mercy merit merry minor model moist moral motor mount
mouse movie nerve noble novel nurse offer olive orbit order organ outer owner panel
patch pause pearl pedal penny petal photo piece pilot pinch pitch pizza porch pound
power press pride prime print prize proof proud pulse punch pupil puppy queue quilt
quite quote raise ranch range rapid ratio reach react relax reply rival roast robot
rough route royal rural salty sauce scale scene scent scope score scout shade shake
shame share shelf shell shift shine shock shoot shore shout shrug sight silly skate
skill skirt slice slide slope smart snack snake solar solid solve sound spark speak
speed spell spend spice spike split sport squad stack staff stage stain stair stamp
steak steam steep stick stiff still stock stool stove straw strip stuff style sunny
super swear swift swing sword taste teach tempo tenth theme thick thief third throw
thumb tired title toast token topic total tough toxic trace track trade trail treat
trend trial tribe trick truck trunk trust twice twist union upper upset urban usual
valid value video visit vital vivid waste weigh weird wheat whale wound wrist yacht
yield youth
"""

WORDS: tuple[str, ...] = tuple(_TEXT.split())
